"""The console command `recnmt`, one module for each subcommand."""
