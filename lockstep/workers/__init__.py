"""What runs on a device or judges a batch: workers, engines, rollouts, reward managers."""
