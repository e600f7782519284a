"""What a configuration will take, by arithmetic, before anything is loaded: `memory` decides, `count` and `needs` give it its numbers."""
