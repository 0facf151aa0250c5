#![no_main]

dmaspace_fuzz::target!(dmaspace_cli, "acpi_tables");
