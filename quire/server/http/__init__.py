"""HTTP/1 on asyncio: h11 reads and writes messages, what stands here gives every connection its time and its place."""
