"""What holds a training back: measured while it runs, judged when it has ended."""
