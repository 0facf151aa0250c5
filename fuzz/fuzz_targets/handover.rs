#![no_main]

dmaspace_fuzz::target!(ioas, "handover");
