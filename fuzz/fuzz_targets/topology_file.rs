#![no_main]

dmaspace_fuzz::target!(dmaspace, "topology_file");
