"""What a link and a codec let a transfer cost, and the controller that decides by it."""
