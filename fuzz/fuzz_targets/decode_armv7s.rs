#![no_main]

dmaspace_fuzz::target!(iopt, "decode_armv7s");
