#![no_main]

dmaspace_fuzz::target!(dmaspace_vfio_user, "vfio_user");
