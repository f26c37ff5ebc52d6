package monitoring_test

// repeats has the alerts whose condition is a rate, so that their cause has to be made again and
// again.
var repeats = []string{
	"CapiAgentCertificateUnusable", "CapiAgentHandshakesFail", "CapiAgentCallsRefused", "CapiAgentClaimsNotDurable", "CapiAgentClaimsSlow",
	"CapiAgentMachinesSlow",
	"KarpenterCapiCertificateUnusable", "KarpenterCapiLaunchesFail", "KarpenterCapiNoCapacity",
}

// concerned are series of which some make the alert true and others do not, in the notation of
// Prometheus's own tests, with a sample each minute of two hours. No component was scraped for
// them.
var concerned = map[string]string{
	"CapiAgentHubUnreachable": `
		capi_agent_hub_reachable{pod="a"} 1x100 0x20
		capi_agent_hub_reachable{pod="b"} 1x100 0x20`,
	"CapiAgentNotSynced": `
		capi_agent_synced{pod="a"} 0x120
		capi_agent_synced{pod="b"} 1x120`,
	// The issuer has a short life, and most of it is left.
	"CapiAgentCertificateExpiring": `
		capi_agent_certificate_not_after_seconds{pod="a",certificate="server"} 600000x120
		capi_agent_certificate_not_before_seconds{pod="a",certificate="server"} -7000000x120
		capi_agent_certificate_not_after_seconds{pod="b",certificate="server"} 7000000x120
		capi_agent_certificate_not_before_seconds{pod="b",certificate="server"} -600000x120
		capi_agent_certificate_not_after_seconds{pod="a",certificate="issuer"} 50000x120
		capi_agent_certificate_not_before_seconds{pod="a",certificate="issuer"} -36400x120
		capi_agent_certificate_not_after_seconds{pod="a",certificate="client-ca"} 10000000x120
		capi_agent_certificate_not_before_seconds{pod="a",certificate="client-ca"} -200000000x120`,
	"CapiAgentHandshakesFail": `
		capi_agent_handshake_errors_total{pod="a",reason="unknown-authority"} 0+6x120
		capi_agent_handshake_errors_total{pod="a",reason="closed"} 0+60x120`,
	"CapiAgentBootstrapCertificateReused": `
		capi_agent_certificate_requests_total{pod="a",purpose="enrollment",result="second-key"} 0x115 1x5
		capi_agent_certificate_requests_total{pod="a",purpose="enrollment",result="refused"} 0+1x120`,
	// Certificates of ten minutes: one is not renewed, the other is. Of 24 hours, with 12 left. Of
	// a year, with 20 days left.
	"CapiAgentSpokeCertificateExpiring": `
		capi_agent_spoke_certificate_not_after_seconds{pod="a",namespace="team-a",cluster="production"} 7250x120
		capi_agent_spoke_certificate_not_before_seconds{pod="a",namespace="team-a",cluster="production"} 6530x120
		capi_agent_spoke_certificate_not_after_seconds{pod="a",namespace="team-a",cluster="staging"} 300+60x120
		capi_agent_spoke_certificate_not_before_seconds{pod="a",namespace="team-a",cluster="staging"} -420+60x120
		capi_agent_spoke_certificate_not_after_seconds{pod="b",namespace="team-a",cluster="staging"} 7200x120
		capi_agent_spoke_certificate_not_before_seconds{pod="b",namespace="team-a",cluster="staging"} 6480x120
		capi_agent_spoke_certificate_not_after_seconds{pod="a",namespace="team-a",cluster="daily"} 50000x120
		capi_agent_spoke_certificate_not_before_seconds{pod="a",namespace="team-a",cluster="daily"} -36400x120
		capi_agent_spoke_certificate_not_after_seconds{pod="a",namespace="team-a",cluster="by-hand"} 1735200x120
		capi_agent_spoke_certificate_not_before_seconds{pod="a",namespace="team-a",cluster="by-hand"} -29800800x120`,
	"CapiAgentSpokeSilent": `
		capi_agent_spoke_connected{pod="a",namespace="team-a",cluster="production"} 1x100 0x20
		capi_agent_spoke_connected{pod="b",namespace="team-a",cluster="production"} 1x101 0x19
		capi_agent_spoke_connected{pod="a",namespace="team-a",cluster="staging"} 1x120`,
	"CapiAgentClaimsNotDurable": `
		capi_agent_claim_creates_total{pod="a",namespace="team-a",cluster="production",result="failed"} 0+1x120
		capi_agent_claim_creates_total{pod="a",namespace="team-a",cluster="production",result="durable"} 0+9x120
		capi_agent_claim_creates_total{pod="a",namespace="team-a",cluster="staging",result="failed"} 0x120
		capi_agent_claim_creates_total{pod="a",namespace="team-a",cluster="staging",result="refused"} 0+9x120
		capi_agent_claim_creates_total{pod="a",namespace="team-a",cluster="staging",result="durable"} 0+9x120`,
	// All of staging's claims are within the objective, some nearly not.
	"CapiAgentClaimsSlow": `
		capi_agent_claim_create_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="2.56"} 0+98x120
		capi_agent_claim_create_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="5.12"} 0+100x120
		capi_agent_claim_create_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="+Inf"} 0+100x120
		capi_agent_claim_create_seconds_bucket{pod="a",namespace="team-a",cluster="staging",le="1.28"} 0+98x120
		capi_agent_claim_create_seconds_bucket{pod="a",namespace="team-a",cluster="staging",le="2.56"} 0+100x120
		capi_agent_claim_create_seconds_bucket{pod="a",namespace="team-a",cluster="staging",le="+Inf"} 0+100x120`,
	"CapiAgentMachinesSlow": `
		capi_agent_claim_bound_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="64"} 0+8x120
		capi_agent_claim_bound_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="128"} 0+10x120
		capi_agent_claim_bound_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="+Inf"} 0+10x120
		capi_agent_claim_bound_seconds_bucket{pod="a",namespace="team-a",cluster="staging",le="32"} 0+1x120
		capi_agent_claim_bound_seconds_bucket{pod="a",namespace="team-a",cluster="staging",le="64"} 0+10x120
		capi_agent_claim_bound_seconds_bucket{pod="a",namespace="team-a",cluster="staging",le="+Inf"} 0+10x120`,
	"CapiAgentMachinesLost": `
		capi_agent_claims_ended_total{pod="a",namespace="team-a",cluster="production",machine_deployment="workers",reason="MachineLost"} 0x100 5x20
		capi_agent_claims_ended_total{pod="a",namespace="team-a",cluster="production",machine_deployment="others",reason="MachineLost"} 0x100 1x20`,
	"CapiAgentLimitNear": `
		capi_agent_cluster_claims{pod="a",namespace="team-a",cluster="production",state="live"} 850x120
		capi_agent_cluster_claims{pod="a",namespace="team-a",cluster="staging",state="live"} 850x120
		capi_agent_cluster_claims{pod="a",namespace="team-a",cluster="free",state="live"} 850x120
		capi_agent_cluster_limit{pod="a",namespace="team-a",cluster="staging",limit="live"} 2000x120
		capi_agent_cluster_limit{pod="a",namespace="team-a",cluster="free",limit="live"} 0x120
		capi_agent_limit{pod="a",limit="live"} 1000x120`,
	"CapiAgentClaimBytesNearLimit": `
		capi_agent_cluster_claim_bytes{pod="a",namespace="team-a",cluster="production"} 250e6x120
		capi_agent_cluster_claim_bytes{pod="b",namespace="team-a",cluster="production"} 250e6x120
		capi_agent_cluster_claim_bytes{pod="a",namespace="team-a",cluster="staging"} 50e6x120
		capi_agent_claim_bytes_limit{pod="a"} 268435456x120`,
	"CapiAgentAllEndedClaimsNearLimit": `
		capi_agent_all_ended_claims{pod="a"} 35000x120
		capi_agent_all_ended_claims{pod="b"} 35000x120
		capi_agent_all_ended_claims_limit{pod="a"} 40000x120
		capi_agent_all_ended_claims_limit{pod="b"} 40000x120`,
	"CapiAgentAllClaimBytesNearLimit": `
		capi_agent_all_claim_bytes{pod="a"} 500e6x120
		capi_agent_all_claim_bytes{pod="b"} 500e6x120
		capi_agent_all_claim_bytes_limit{pod="a"} 536870912x120
		capi_agent_all_claim_bytes_limit{pod="b"} 536870912x120`,
	"CapiAgentCreationsNearLimit": `
		capi_agent_node_group_recent_creations{pod="a",namespace="team-a",cluster="production",machine_deployment="workers"} 0x117 90 40 0
		capi_agent_node_group_recent_creations{pod="a",namespace="team-a",cluster="production",machine_deployment="others"} 80x120
		capi_agent_node_group_recent_creations{pod="a",namespace="team-a",cluster="staging",machine_deployment="staging"} 90x120
		capi_agent_node_group_recent_creations{pod="a",namespace="team-a",cluster="free",machine_deployment="free"} 90x120
		capi_agent_cluster_limit{pod="a",namespace="team-a",cluster="staging",limit="creations"} 200x120
		capi_agent_cluster_limit{pod="a",namespace="team-a",cluster="production",limit="releases"} 10x120
		capi_agent_cluster_limit{pod="a",namespace="team-a",cluster="free",limit="creations"} 0x120
		capi_agent_limit{pod="a",limit="creations"} 100x120`,
	"CapiAgentReleasesNearLimit": `
		capi_agent_cluster_recent_releases{pod="a",namespace="team-a",cluster="production"} 0x117 10 45 45
		capi_agent_cluster_recent_releases{pod="b",namespace="team-a",cluster="production"} 0x118 44 45
		capi_agent_cluster_recent_releases{pod="a",namespace="team-a",cluster="quiet"} 40x120
		capi_agent_cluster_recent_releases{pod="a",namespace="team-a",cluster="staging"} 45x120
		capi_agent_cluster_recent_releases{pod="a",namespace="team-a",cluster="free"} 45x120
		capi_agent_cluster_limit{pod="a",namespace="team-a",cluster="staging",limit="releases"} 200x120
		capi_agent_cluster_limit{pod="a",namespace="team-a",cluster="free",limit="releases"} 0x120
		capi_agent_limit{pod="a",limit="releases"} 50x120`,
	"CapiAgentNodePoolSetNotApplied": `
		capi_agent_node_pool_set_clusters{pod="a",namespace="team-a",node_pool_set="general",state="failing"} 1x120
		capi_agent_node_pool_set_clusters{pod="a",namespace="team-a",node_pool_set="general",state="applied"} 7x120
		capi_agent_node_pool_set_clusters{pod="b",namespace="team-a",node_pool_set="general",state="failing"} 1x120
		capi_agent_node_pool_set_clusters{pod="a",namespace="team-a",node_pool_set="spot",state="failing"} 0x120`,
	"KarpenterCapiAgentUnreachable": `
		karpenter_capi_agent_connected{pod="a",stream="nodegroups"} 1x100 0x20
		karpenter_capi_agent_connected{pod="b",stream="nodegroups"} 1x100 0x20
		karpenter_capi_agent_connected{pod="a",stream="claims"} 1x120`,
	"KarpenterCapiAgentIncompatible": `
		karpenter_capi_agent_compatible{pod="a"} 0x120
		karpenter_capi_agent_compatible{pod="b"} 1x120`,
	// Of ten minutes, and not renewed. The standby's is older.
	"KarpenterCapiCertificateExpiring": `
		karpenter_capi_agent_certificate_not_after_seconds{pod="a",certificate="client"} 7250x120
		karpenter_capi_agent_certificate_not_before_seconds{pod="a",certificate="client"} 6530x120
		karpenter_capi_agent_certificate_not_after_seconds{pod="b",certificate="client"} 7000x120
		karpenter_capi_agent_certificate_not_before_seconds{pod="b",certificate="client"} 6280x120`,
	"KarpenterCapiAuthorityExpiring": `
		karpenter_capi_agent_certificate_not_after_seconds{pod="a",certificate="agent-ca"} 600000x120
		karpenter_capi_agent_certificate_not_before_seconds{pod="a",certificate="agent-ca"} -300000000x120
		karpenter_capi_agent_certificate_not_after_seconds{pod="b",certificate="agent-ca"} 0x120
		karpenter_capi_agent_certificate_not_before_seconds{pod="b",certificate="agent-ca"} 0x120`,
	"KarpenterCapiLaunchesFail": `
		karpenter_capi_claims_total{pod="a",result="AgentRefused"} 0+1x120
		karpenter_capi_claims_total{pod="a",result="no_capacity"} 0+1x120
		karpenter_capi_claims_total{pod="a",result="claimed"} 0+8x120`,
}

// healthy is a fleet at work: a machine that fails now and then, a node group without room for a
// while, a port scan.
const healthy = `
	capi_agent_build_info{pod="a"} 1x120
	capi_agent_hub_reachable{pod="a"} 1x120
	capi_agent_hub_reachable{pod="b"} 0x3 1x117
	capi_agent_synced{pod="a"} 0x2 1x118
	capi_agent_policy_usable{pod="a"} 1x120
	capi_agent_price_list_usable{pod="a"} 1x120
	capi_agent_claim_panics_total{pod="a"} 0x120
	capi_agent_panics_total{pod="a",confined_to="object"} 0x120
	capi_agent_certificate_not_after_seconds{pod="a",certificate="server"} 3000000x120
	capi_agent_certificate_not_before_seconds{pod="a",certificate="server"} -4776000x120
	capi_agent_certificate_not_after_seconds{pod="a",certificate="client-ca"} 50000x120
	capi_agent_certificate_not_before_seconds{pod="a",certificate="client-ca"} -36400x120
	capi_agent_certificate_reload_errors_total{pod="a",certificate="server"} 0x80 1x40
	capi_agent_handshake_errors_total{pod="a",reason="closed"} 0+60x120
	capi_agent_handshake_errors_total{pod="a",reason="expired"} 0x115 3x5
	capi_agent_certificate_requests_total{pod="a",purpose="enrollment",result="issued"} 0x60 1x60
	capi_agent_certificate_requests_total{pod="a",purpose="enrollment",result="second-key"} 0x120
	capi_agent_certificate_requests_total{pod="a",purpose="renewal",result="issued"} 0+1x120
	capi_agent_certificate_requests_total{pod="a",purpose="renewal",result="failed"} 0x100 2x20
	capi_agent_spoke_connected{pod="a",namespace="team-a",cluster="production"} 1x120
	capi_agent_spoke_certificate_not_after_seconds{pod="a",namespace="team-a",cluster="production"} 50000x120
	capi_agent_spoke_certificate_not_before_seconds{pod="a",namespace="team-a",cluster="production"} -36400x120
	capi_agent_spoke_certificate_not_after_seconds{pod="a",namespace="team-a",cluster="staging"} 300+60x120
	capi_agent_spoke_certificate_not_before_seconds{pod="a",namespace="team-a",cluster="staging"} -420+60x120
	capi_agent_calls_refused_total{pod="a",reason="rate",method="CreateClaim"} 0+6x120
	capi_agent_claim_creates_total{pod="a",namespace="team-a",cluster="production",result="durable"} 0+10x120
	capi_agent_claim_creates_total{pod="a",namespace="team-a",cluster="production",result="refused"} 0+10x120
	capi_agent_claim_creates_total{pod="a",namespace="team-a",cluster="production",result="failed"} 0x110 1x10
	capi_agent_claim_create_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="1.28"} 0+10x120
	capi_agent_claim_create_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="+Inf"} 0+10x120
	capi_agent_claim_bound_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="32"} 0+10x120
	capi_agent_claim_bound_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="+Inf"} 0+10x120
	capi_agent_claims_ended_total{pod="a",namespace="team-a",cluster="production",machine_deployment="workers",reason="Failed",class="Quota"} 0x100 1x20
	capi_agent_claims_ended_total{pod="a",namespace="team-a",cluster="production",machine_deployment="workers",reason="MachineLost"} 0x100 1x20
	capi_agent_claims_ended_total{pod="a",namespace="team-a",cluster="production",machine_deployment="workers",reason="Released"} 0+9x120
	capi_agent_claims_refused_total{pod="a",namespace="team-a",cluster="production",limit="live"} 0x120
	capi_agent_limit{pod="a",limit="live"} 20000x120
	capi_agent_limit{pod="a",limit="creations"} 100x120
	capi_agent_limit{pod="a",limit="releases"} 50x120
	capi_agent_cluster_claims{pod="a",namespace="team-a",cluster="production",state="live"} 300x120
	capi_agent_all_ended_claims{pod="a"} 30000x120
	capi_agent_all_ended_claims_limit{pod="a"} 40000x120
	capi_agent_all_claim_bytes{pod="a"} 400e6x120
	capi_agent_all_claim_bytes_limit{pod="a"} 536870912x120
	capi_agent_node_group_recent_creations{pod="a",namespace="team-a",cluster="production",machine_deployment="workers"} 0x110 80x10
	capi_agent_cluster_recent_releases{pod="a",namespace="team-a",cluster="production"} 0x110 20x10
	capi_agent_node_group_problems{pod="a",namespace="team-a",machine_deployment="workers"} 0x120
	karpenter_build_info{pod="a"} 1x120
	karpenter_capi_agent_connected{pod="a",stream="claims"} 1x100 0x2 1x18
	karpenter_capi_agent_connected{pod="b",stream="claims"} 0x100 1x20
	karpenter_capi_claim_sync_last_success_timestamp_seconds{pod="a"} 0+60x120
	karpenter_capi_agent_certificate_not_after_seconds{pod="a",certificate="client"} 300+60x120
	karpenter_capi_agent_certificate_not_before_seconds{pod="a",certificate="client"} -420+60x120
	karpenter_capi_agent_certificate_not_after_seconds{pod="a",certificate="agent-ca"} 50000x120
	karpenter_capi_agent_certificate_not_before_seconds{pod="a",certificate="agent-ca"} -36400x120
	karpenter_capi_agent_certificate_reload_errors_total{pod="a",certificate="client"} 0x120
	karpenter_capi_agent_certificate_requests_total{pod="a",purpose="renewal",result="issued"} 0+1x120
	karpenter_capi_claims_total{pod="a",result="claimed"} 0+10x120
	karpenter_capi_claims_total{pod="a",result="no_capacity"} 0x100 3x20
	karpenter_capi_node_claims_given_up_total{pod="a",reason="Failed"} 0x100 1x20
	karpenter_capi_node_claims_without_claim{pod="a"} 0x120
	karpenter_capi_claims_kept_without_node_claim{pod="a"} 0x120
	karpenter_capi_provider_id_conflicts_total{pod="a"} 0x120
	karpenter_capi_node_claims_awaited{pod="a"} 3x2 0x118
	karpenter_capi_catalogue_node_groups{pod="a"} 5x120
	karpenter_capi_catalogue_node_groups_unusable{pod="a"} 0x120
`
