#![no_main]

dmaspace_fuzz::target!(dmaspace, "machine_files");
