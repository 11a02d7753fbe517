"""The decoder and the runner that feeds it ragged batches."""
