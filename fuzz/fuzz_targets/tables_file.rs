#![no_main]

dmaspace_fuzz::target!(dmaspace, "tables_file");
