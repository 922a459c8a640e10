"""Where replicas come from: the configured list, and DNS names that are looked up again."""

from router.discovery.dns import DnsDiscovery, Resolver, system_resolver
from router.discovery.static import dns_names, static_replicas

__all__ = ["DnsDiscovery", "Resolver", "dns_names", "static_replicas", "system_resolver"]
