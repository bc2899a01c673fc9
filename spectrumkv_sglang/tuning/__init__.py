"""What a link and a codec let a transfer cost: models that sizing and online decisions share."""
