"""The generator process: sample, score and send groups of rollouts; apply new weights in place."""
