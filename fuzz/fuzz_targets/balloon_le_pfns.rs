#![no_main]

dmaspace_fuzz::target!(virtio_balloon, "balloon_le_pfns");
