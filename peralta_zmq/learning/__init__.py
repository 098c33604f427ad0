"""Training: from rollout groups to an optimizer step. Start reading at `learner.Learner.learn`."""
