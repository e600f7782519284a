"""What a run says about itself: metrics that know how to reduce, stage times, trackers and the display."""
