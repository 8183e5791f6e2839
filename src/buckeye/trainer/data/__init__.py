"""From samples and chats to packed micro-batches. No model is seen here."""
