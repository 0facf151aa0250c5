#![no_main]

dmaspace_fuzz::target!(dmaspace_vhost, "vhost_user");
