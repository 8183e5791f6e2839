"""What is said over HTTP in the forms of others: their requests, messages and errors. No input or output."""
