#![no_main]

dmaspace_fuzz::target!(iopt, "decode_x86_64");
