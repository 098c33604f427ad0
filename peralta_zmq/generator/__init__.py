"""The generator process: samples, scores and sends groups; applies new weights."""
