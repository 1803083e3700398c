"""What the numbers in tensors are like: least, greatest, mean, NaN, and a histogram, in bounded memory."""
