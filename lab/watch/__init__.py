"""`lab watch`: training runs while they train, in the browser and in the terminal."""
