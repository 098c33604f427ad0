"""Training on rollout groups. Start reading at `learner.Learner`."""
