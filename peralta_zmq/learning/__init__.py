"""Training: from rollout groups to a training step. Start reading at `learner.Learner.learn`."""
