#![no_main]

dmaspace_fuzz::target!(dmaspace, "vhost_user");
