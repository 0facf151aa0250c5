#![no_main]

dmaspace_fuzz::target!(dmaspace, "successor");
