#![no_main]

dmaspace_fuzz::target!(dmaspace_cli, "explain_input");
