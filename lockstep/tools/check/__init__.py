"""`lockstep check`: try the properties that every loss and estimator must have on a function of your own."""
