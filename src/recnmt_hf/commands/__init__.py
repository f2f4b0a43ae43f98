"""What the console command `recnmt` and the scripts call."""
