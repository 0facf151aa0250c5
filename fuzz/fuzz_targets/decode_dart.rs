#![no_main]

dmaspace_fuzz::target!(iopt, "decode_dart");
