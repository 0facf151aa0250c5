#![no_main]

dmaspace_fuzz::target!(dmaspace_cli, "command_line");
