"""What each layer's keys and values cost a model in few bits, and the precision map that costs least at a budget."""
