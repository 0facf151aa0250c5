#![no_main]

dmaspace_fuzz::target!(dmaspace_cli, "machine_files");
