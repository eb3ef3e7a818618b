"""The k best columns of each row."""
