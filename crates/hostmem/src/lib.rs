//! Linux host memory for devices: backings, pins, frames, limits.
