#![no_main]

dmaspace_fuzz::target!(iopt, "readers");
