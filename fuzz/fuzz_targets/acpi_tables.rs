#![no_main]

dmaspace_fuzz::target!(dmaspace, "acpi_tables");
