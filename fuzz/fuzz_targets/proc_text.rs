#![no_main]

dmaspace_fuzz::target!(dmaspace, "proc_text");
