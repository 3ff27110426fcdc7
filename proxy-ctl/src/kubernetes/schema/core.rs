//! Objects of the API group core/v1.

use super::{messages, meta::ObjectMeta};

messages! {
    Service {
        (1, message, required) metadata: ObjectMeta,
        (2, message, optional) spec: Option<ServiceSpec>,
        (3, message, required) status: ServiceStatus,
    }

    ServiceSpec {
        (1, message, repeated) ports: Vec<ServicePort>,
        (3, string) cluster_ip as "clusterIP": String,
        (4, string) service_type as "type": String,
        (5, string, repeated) external_ips as "externalIPs": Vec<String>,
        (7, string) session_affinity: String,
        (9, string, repeated) load_balancer_source_ranges: Vec<String>,
        (11, string) external_traffic_policy: String,
        (12, int32) health_check_node_port: i32,
        (14, message, optional) session_affinity_config: Option<SessionAffinityConfig>,
        (18, string, repeated) cluster_ips as "clusterIPs": Vec<String>,
        (22, string, optional) internal_traffic_policy: Option<String>,
    }

    ServicePort {
        (1, string) name: String,
        (2, string) protocol: String,
        (3, int32) port: i32,
        (5, int32) node_port: i32,
    }

    SessionAffinityConfig {
        (1, message, optional) client_ip as "clientIP": Option<ClientIpConfig>,
    }

    ClientIpConfig {
        (1, int32, optional) timeout_seconds: Option<i32>,
    }

    ServiceStatus {
        (1, message, required) load_balancer: LoadBalancerStatus,
    }

    LoadBalancerStatus {
        (1, message, repeated) ingress: Vec<LoadBalancerIngress>,
    }

    LoadBalancerIngress {
        (1, string) ip: String,
        (3, string, optional) ip_mode: Option<String>,
    }

    Node {
        (1, message, required) metadata: ObjectMeta,
        (2, message, required) spec: NodeSpec,
        (3, message, required) status: NodeStatus,
    }

    NodeSpec {
        (1, string) pod_cidr as "podCIDR": String,
        (5, message, repeated) taints: Vec<Taint>,
        (7, string, repeated) pod_cidrs as "podCIDRs": Vec<String>,
    }

    Taint {
        (1, string) key: String,
    }

    NodeStatus {
        (5, message, repeated) addresses: Vec<NodeAddress>,
    }

    NodeAddress {
        (1, string) address_type as "type": String,
        (2, string) address: String,
    }
}
