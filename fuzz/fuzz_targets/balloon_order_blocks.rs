#![no_main]

dmaspace_fuzz::target!(virtio_balloon, "balloon_order_blocks");
