#![no_main]

dmaspace_fuzz::target!(dmaspace_cli, "proc_text");
