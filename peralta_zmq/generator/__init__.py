"""The generator process: sample, score and send groups; load new weights in place."""
