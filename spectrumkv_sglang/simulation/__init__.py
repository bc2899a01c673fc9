"""What the controller would choose: requests and links replayed."""
