"""HTTP client with retries, backoff and a shared rate limit."""
