"""`python -m text_2048`: serve one game on standard input and output."""

from text_2048.server import server

if __name__ == "__main__":
    server.run()
