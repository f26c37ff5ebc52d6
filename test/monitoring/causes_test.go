package monitoring_test

// cause is what makes an alert fire.
type cause struct {
	// series are what Prometheus has then, in the notation of its own tests, with a sample each
	// minute of two hours.
	series string
	// test is the test of a component, as file:function, in which the component itself exports a value
	// that makes the alert's condition true. Empty if the condition is that nothing is scraped.
	test string
	// seen are texts of that test, with which it fails if the value does not make the condition true.
	seen []string
}

var causes = map[string]cause{
	"CapiAgentDown": {},
	"CapiAgentHubUnreachable": {
		`capi_agent_hub_reachable{pod="a"} 1x100 0x20
		 capi_agent_hub_reachable{pod="b"} 1x100 0x20`,
		"agent/internal/server/contact_test.go:TestTheMetricShowsThatNoRequestToTheHubIsAnswered",
		[]string{"capi_agent_hub_reachable `+reachable+", `become("0")`},
	},
	"CapiAgentNotSynced": {
		`capi_agent_synced{pod="a"} 0x120
		 capi_agent_synced{pod="b"} 1x120`,
		"agent/internal/server/server_test.go:TestNothingIsAnsweredBeforeTheViewIsComplete",
		[]string{"\ncapi_agent_synced 0\n"},
	},
	"CapiAgentPolicyInvalid": {
		`capi_agent_policy_usable{pod="a"} 0x120`,
		"agent/internal/agent/policy_test.go:TestAPolicyInTheHubIsInForceAtOnceAndForGood",
		[]string{"assert.InDelta(c, wanted, family.GetMetric()[0].GetGauge().GetValue(), 0)", "usable(0)"},
	},
	"CapiAgentPriceListInvalid": {
		`capi_agent_price_list_usable{pod="a"} 0x120`,
		"agent/internal/nodegroupview/nodegroupview_test.go:TestPriceListIsFollowedAndABadOneIsNotUsed",
		[]string{`metric("capi_agent_price_list_usable", 0)`},
	},
	"CapiAgentStepPanicked": {
		`capi_agent_claim_panics_total{pod="a"} 0x115 1x5`,
		"agent/internal/claims/panics_test.go:TestAPanicCostsOneNodeGroupAlone",
		[]string{`assert.Greater(t, measured(t, "capi_agent_claim_panics_total", nil), before)`},
	},
	"CapiAgentPanicked": {
		`capi_agent_panics_total{pod="a",confined_to="object"} 0x115 1x5`,
		"agent/internal/hub/confined_test.go:TestAPanicInACacheCostsOneObjectAlone",
		[]string{"require.Greater(t, testutil.ToFloat64(panics.Objects), counted)"},
	},
	"CapiAgentCertificateExpiring": {
		// The issuer has a short life, and most of it is left.
		`capi_agent_certificate_not_after_seconds{pod="a",certificate="server"} 600000x120
		 capi_agent_certificate_not_before_seconds{pod="a",certificate="server"} -7000000x120
		 capi_agent_certificate_not_after_seconds{pod="b",certificate="server"} 7000000x120
		 capi_agent_certificate_not_before_seconds{pod="b",certificate="server"} -600000x120
		 capi_agent_certificate_not_after_seconds{pod="a",certificate="issuer"} 50000x120
		 capi_agent_certificate_not_before_seconds{pod="a",certificate="issuer"} -36400x120
		 capi_agent_certificate_not_after_seconds{pod="a",certificate="client-ca"} 10000000x120
		 capi_agent_certificate_not_before_seconds{pod="a",certificate="client-ca"} -200000000x120`,
		"agent/internal/server/requests_test.go:TestACertificateThatIsAboutToExpireIsShown",
		[]string{"until-float64(time.Now().Unix()) < min((until-from)/4, (7*24*time.Hour).Seconds())", "require.Eventually(t, expires,"},
	},
	"CapiAgentCertificateUnusable": {
		`capi_agent_certificate_reload_errors_total{pod="a",certificate="server"} 0+12x120`,
		"agent/internal/server/requests_test.go:TestReplacedFilesShowInMetricsAndNotInLogs",
		[]string{`metric("capi_agent_certificate_reload_errors_total", "server") > 0`},
	},
	"CapiAgentHandshakesFail": {
		`capi_agent_handshake_errors_total{pod="a",reason="unknown-authority"} 0+6x120
		 capi_agent_handshake_errors_total{pod="a",reason="closed"} 0+60x120`,
		"agent/internal/server/handshakes_test.go:TestHandshakesThatFailAreCountedWhileServing",
		[]string{`float64(handshakeErrors(t, f.registry)["unknown-authority"])/(15*time.Minute).Seconds() > 0.01`},
	},
	"CapiAgentBootstrapCertificateReused": {
		`capi_agent_certificate_requests_total{pod="a",purpose="enrollment",result="second-key"} 0x115 1x5
		 capi_agent_certificate_requests_total{pod="a",purpose="enrollment",result="refused"} 0+1x120`,
		"agent/internal/agent/onboarding_test.go:TestCertificatesThatAreIssuedAndRefusedAreEventsAndCounted",
		[]string{`"enrollment second-key": 1`},
	},
	"CapiAgentSpokeCertificateExpiring": {
		// Certificates of ten minutes: one is not renewed, the other is. Of 24 hours, with 12 left. Of a
		// year, with 20 days left.
		`capi_agent_spoke_certificate_not_after_seconds{pod="a",namespace="team-a",cluster="production"} 7250x120
		 capi_agent_spoke_certificate_not_before_seconds{pod="a",namespace="team-a",cluster="production"} 6530x120
		 capi_agent_spoke_certificate_not_after_seconds{pod="a",namespace="team-a",cluster="staging"} 300+60x120
		 capi_agent_spoke_certificate_not_before_seconds{pod="a",namespace="team-a",cluster="staging"} -420+60x120
		 capi_agent_spoke_certificate_not_after_seconds{pod="b",namespace="team-a",cluster="staging"} 7200x120
		 capi_agent_spoke_certificate_not_before_seconds{pod="b",namespace="team-a",cluster="staging"} 6480x120
		 capi_agent_spoke_certificate_not_after_seconds{pod="a",namespace="team-a",cluster="daily"} 50000x120
		 capi_agent_spoke_certificate_not_before_seconds{pod="a",namespace="team-a",cluster="daily"} -36400x120
		 capi_agent_spoke_certificate_not_after_seconds{pod="a",namespace="team-a",cluster="by-hand"} 1735200x120
		 capi_agent_spoke_certificate_not_before_seconds{pod="a",namespace="team-a",cluster="by-hand"} -29800800x120`,
		"agent/internal/agent/onboarding_test.go:TestASilentSpokeIsNotConnected",
		[]string{
			"until := now.Now().Add(time.Hour)\n",
			"from := until.Add(-24 * time.Hour)\n",
			`shown("capi_agent_spoke_certificate_not_after_seconds", until.Unix())`,
		},
	},
	"CapiAgentSpokeSilent": {
		`capi_agent_spoke_connected{pod="a",namespace="team-a",cluster="production"} 1x100 0x20
		 capi_agent_spoke_connected{pod="b",namespace="team-a",cluster="production"} 1x101 0x19
		 capi_agent_spoke_connected{pod="a",namespace="team-a",cluster="staging"} 1x120`,
		"agent/internal/agent/onboarding_test.go:TestASilentSpokeIsNotConnected",
		[]string{`shown("capi_agent_spoke_connected", 0)`},
	},
	"CapiAgentCallsRefused": {
		`capi_agent_calls_refused_total{pod="a",reason="rate",method="CreateClaim"} 0+600x120`,
		"agent/internal/limits/limits_test.go:TestACallerThatCallsTooOftenIsRefusedAndNoOther",
		[]string{"require.Greater(t, refused/(15*time.Minute).Seconds(), 1.0)"},
	},
	"CapiAgentClaimsNotDurable": {
		`capi_agent_claim_creates_total{pod="a",namespace="team-a",cluster="production",result="failed"} 0+1x120
		 capi_agent_claim_creates_total{pod="a",namespace="team-a",cluster="production",result="durable"} 0+9x120
		 capi_agent_claim_creates_total{pod="a",namespace="team-a",cluster="staging",result="failed"} 0x120
		 capi_agent_claim_creates_total{pod="a",namespace="team-a",cluster="staging",result="refused"} 0+9x120
		 capi_agent_claim_creates_total{pod="a",namespace="team-a",cluster="staging",result="durable"} 0+9x120`,
		"agent/internal/claims/metrics_test.go:TestAClaimsLifeIsMeasuredByCluster",
		[]string{"assert.Greater(t, failed/(failed+durable), 0.05)"},
	},
	"CapiAgentClaimsSlow": {
		// All of staging's claims are within the objective, some nearly not.
		`capi_agent_claim_create_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="2.56"} 0+98x120
		 capi_agent_claim_create_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="5.12"} 0+100x120
		 capi_agent_claim_create_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="+Inf"} 0+100x120
		 capi_agent_claim_create_seconds_bucket{pod="a",namespace="team-a",cluster="staging",le="1.28"} 0+98x120
		 capi_agent_claim_create_seconds_bucket{pod="a",namespace="team-a",cluster="staging",le="2.56"} 0+100x120
		 capi_agent_claim_create_seconds_bucket{pod="a",namespace="team-a",cluster="staging",le="+Inf"} 0+100x120`,
		"agent/internal/claims/alerts_test.go:TestSlowClaimsAndSlowMachinesMissTheObjectives",
		[]string{"require.Less(t, claims(), 0.99)"},
	},
	"CapiAgentMachinesSlow": {
		`capi_agent_claim_bound_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="64"} 0+8x120
		 capi_agent_claim_bound_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="128"} 0+10x120
		 capi_agent_claim_bound_seconds_bucket{pod="a",namespace="team-a",cluster="production",le="+Inf"} 0+10x120
		 capi_agent_claim_bound_seconds_bucket{pod="a",namespace="team-a",cluster="staging",le="32"} 0+1x120
		 capi_agent_claim_bound_seconds_bucket{pod="a",namespace="team-a",cluster="staging",le="64"} 0+10x120
		 capi_agent_claim_bound_seconds_bucket{pod="a",namespace="team-a",cluster="staging",le="+Inf"} 0+10x120`,
		"agent/internal/claims/alerts_test.go:TestSlowClaimsAndSlowMachinesMissTheObjectives",
		[]string{"require.Less(t, machines(), 0.9)"},
	},
	"CapiAgentClaimsFail": {
		`capi_agent_claims_ended_total{pod="a",namespace="team-a",cluster="spoke",machine_deployment="small",reason="Failed",class="Configuration"} 0+1x120
		 capi_agent_claim_creates_total{pod="a",namespace="team-a",cluster="spoke",result="durable"} 0+5x120`,
		"agent/internal/claims/metrics_test.go:TestAClaimsLifeIsMeasuredByCluster",
		[]string{`assert.Greater(t, measured(t, "capi_agent_claims_ended_total", with("reason", protocol.ReasonFailed))/durable, 0.05)`},
	},
	"CapiAgentMachinesLost": {
		`capi_agent_claims_ended_total{pod="a",namespace="team-a",cluster="production",machine_deployment="workers",reason="MachineLost"} 0x100 5x20
		 capi_agent_claims_ended_total{pod="a",namespace="team-a",cluster="production",machine_deployment="others",reason="MachineLost"} 0x100 1x20`,
		"agent/internal/claims/alerts_test.go:TestMachinesThatAnotherActorDeletesAreCountedByNodeGroup",
		[]string{"require.Greater(t, lost(), 2.0)"},
	},
	"CapiAgentClaimsOwnerMissing": {
		`capi_agent_claims_owner_missing{pod="a",namespace="team-a",cluster="production"} 2x120`,
		"agent/internal/claims/metrics_test.go:TestWhatWaitsForAPersonIsShown",
		[]string{`assert.InDelta(t, 1, measured(t, "capi_agent_claims_owner_missing", `},
	},
	"CapiAgentClaimsLimited": {
		`capi_agent_claims_refused_total{pod="a",namespace="team-a",cluster="production",limit="live"} 0x110 1+1x10`,
		"agent/internal/claims/metrics_test.go:TestALimitThatIsReachedIsCounted",
		[]string{`assert.InDelta(t, before+1, measured(t, "capi_agent_claims_refused_total", limit), 0)`},
	},
	"CapiAgentLimitNear": {
		`capi_agent_cluster_claims{pod="a",namespace="team-a",cluster="production",state="live"} 850x120
		 capi_agent_cluster_claims{pod="a",namespace="team-a",cluster="staging",state="live"} 850x120
		 capi_agent_cluster_claims{pod="a",namespace="team-a",cluster="free",state="live"} 850x120
		 capi_agent_cluster_limit{pod="a",namespace="team-a",cluster="staging",limit="live"} 2000x120
		 capi_agent_cluster_limit{pod="a",namespace="team-a",cluster="free",limit="live"} 0x120
		 capi_agent_limit{pod="a",limit="live"} 1000x120`,
		"agent/internal/claims/alerts_test.go:TestAClusterThatComesNearItsLimitsIsShown",
		[]string{"require.Greater(t, live(), 0.8)"},
	},
	"CapiAgentClaimBytesNearLimit": {
		`capi_agent_cluster_claim_bytes{pod="a",namespace="team-a",cluster="production"} 250e6x120
		 capi_agent_cluster_claim_bytes{pod="b",namespace="team-a",cluster="production"} 250e6x120
		 capi_agent_cluster_claim_bytes{pod="a",namespace="team-a",cluster="staging"} 50e6x120
		 capi_agent_claim_bytes_limit{pod="a"} 268435456x120`,
		"agent/internal/agent/budgeted_test.go:TestAClusterStoresNoMoreBytesThanItMay",
		[]string{"require.Greater(t, used, 0.8)"},
	},
	"CapiAgentAllEndedClaimsNearLimit": {
		`capi_agent_all_ended_claims{pod="a"} 35000x120
		 capi_agent_all_ended_claims{pod="b"} 35000x120
		 capi_agent_all_ended_claims_limit{pod="a"} 40000x120
		 capi_agent_all_ended_claims_limit{pod="b"} 40000x120`,
		"agent/internal/agent/budgeted_test.go:TestEndedClaimsOfAllClustersAreLimitedTogether",
		[]string{"require.Greater(t, ofEnded, 0.8)"},
	},
	"CapiAgentAllClaimBytesNearLimit": {
		`capi_agent_all_claim_bytes{pod="a"} 500e6x120
		 capi_agent_all_claim_bytes{pod="b"} 500e6x120
		 capi_agent_all_claim_bytes_limit{pod="a"} 536870912x120
		 capi_agent_all_claim_bytes_limit{pod="b"} 536870912x120`,
		"agent/internal/agent/budgeted_test.go:TestEndedClaimsOfAllClustersAreLimitedTogether",
		[]string{"require.Greater(t, ofBytes, 0.8)"},
	},
	"CapiAgentCreationsNearLimit": {
		`capi_agent_node_group_recent_creations{pod="a",namespace="team-a",cluster="production",machine_deployment="workers"} 0x117 90 40 0
		 capi_agent_node_group_recent_creations{pod="a",namespace="team-a",cluster="production",machine_deployment="others"} 80x120
		 capi_agent_node_group_recent_creations{pod="a",namespace="team-a",cluster="staging",machine_deployment="staging"} 90x120
		 capi_agent_node_group_recent_creations{pod="a",namespace="team-a",cluster="free",machine_deployment="free"} 90x120
		 capi_agent_cluster_limit{pod="a",namespace="team-a",cluster="staging",limit="creations"} 200x120
		 capi_agent_cluster_limit{pod="a",namespace="team-a",cluster="production",limit="releases"} 10x120
		 capi_agent_cluster_limit{pod="a",namespace="team-a",cluster="free",limit="creations"} 0x120
		 capi_agent_limit{pod="a",limit="creations"} 100x120`,
		"agent/internal/claims/alerts_test.go:TestAClusterThatComesNearItsLimitsIsShown",
		[]string{"require.Greater(t, creations(), 0.8)"},
	},
	"CapiAgentReleasesNearLimit": {
		`capi_agent_cluster_recent_releases{pod="a",namespace="team-a",cluster="production"} 0x117 10 45 45
		 capi_agent_cluster_recent_releases{pod="b",namespace="team-a",cluster="production"} 0x118 44 45
		 capi_agent_cluster_recent_releases{pod="a",namespace="team-a",cluster="quiet"} 40x120
		 capi_agent_cluster_recent_releases{pod="a",namespace="team-a",cluster="staging"} 45x120
		 capi_agent_cluster_recent_releases{pod="a",namespace="team-a",cluster="free"} 45x120
		 capi_agent_cluster_limit{pod="a",namespace="team-a",cluster="staging",limit="releases"} 200x120
		 capi_agent_cluster_limit{pod="a",namespace="team-a",cluster="free",limit="releases"} 0x120
		 capi_agent_limit{pod="a",limit="releases"} 50x120`,
		"agent/internal/claims/alerts_test.go:TestAClusterThatComesNearItsLimitsIsShown",
		[]string{"require.Greater(t, releases(), 0.8)"},
	},
	"CapiAgentNodeGroupFrozen": {
		`capi_agent_node_group_frozen{pod="a",namespace="team-a",machine_deployment="workers"} 1x120`,
		"agent/internal/claims/metrics_test.go:TestWhatWaitsForAPersonIsShown",
		[]string{`assert.InDelta(t, 1, measured(t, "capi_agent_node_group_frozen", `},
	},
	"CapiAgentLedgerUnreadable": {
		`capi_agent_ledger_unreadable{pod="a",namespace="team-a",machine_deployment="workers"} 1x120`,
		"agent/internal/claims/collector_test.go:TestCollectorShowsEveryPartOfTheLedger",
		[]string{"capi_agent_ledger_unreadable{machine_deployment=\"broken\",namespace=\"fleet\"} 1\n"},
	},
	"CapiAgentNodePoolSetNotApplied": {
		`capi_agent_node_pool_set_clusters{pod="a",namespace="team-a",node_pool_set="general",state="failing"} 1x120
		 capi_agent_node_pool_set_clusters{pod="a",namespace="team-a",node_pool_set="general",state="applied"} 7x120
		 capi_agent_node_pool_set_clusters{pod="b",namespace="team-a",node_pool_set="general",state="failing"} 1x120
		 capi_agent_node_pool_set_clusters{pod="a",namespace="team-a",node_pool_set="spot",state="failing"} 0x120`,
		"agent/internal/agent/nodepools_test.go:TestTheHubShowsWhatSpokesReport",
		[]string{"h.counts(clustersMetric, 0, 1, 0)"},
	},
	"CapiAgentNodeGroupProblems": {
		`capi_agent_node_group_problems{pod="a",namespace="team-a",machine_deployment="workers"} 1x120`,
		"agent/internal/nodegroupview/nodegroupview_test.go:TestProblemsAreReportedOnceEachAndCounted",
		[]string{"require.InDelta(t, 3, problems(), 0)"},
	},

	"KarpenterCapiDown": {},
	"KarpenterCapiAgentUnreachable": {
		`karpenter_capi_agent_connected{pod="a",stream="nodegroups"} 1x100 0x20
		 karpenter_capi_agent_connected{pod="b",stream="nodegroups"} 1x100 0x20
		 karpenter_capi_agent_connected{pod="a",stream="claims"} 1x120`,
		"shim/internal/connectivity/connectivity_test.go:TestTheConnectionIsAMetric",
		[]string{"connected(t) == 0"},
	},
	"KarpenterCapiAgentIncompatible": {
		`karpenter_capi_agent_compatible{pod="a"} 0x120
		 karpenter_capi_agent_compatible{pod="b"} 1x120`,
		"shim/internal/connectivity/compatibility_test.go:TestTheAgentIsCheckedAtTheStartAndAgain",
		[]string{`assert.Zero(t, shimtest.Metric(t, "karpenter_capi_agent_compatible", nil))`},
	},
	"KarpenterCapiClaimSyncStale": {
		`karpenter_capi_claim_sync_last_success_timestamp_seconds{pod="a"} 0+60x90 5400x30`,
		"shim/internal/controllers/claimsync/controller_test.go:TestTheAgeOfTheLastSetCountsFromTheFirstAttempt",
		[]string{"assert.Greater(t, age(), 600.0)"},
	},
	"KarpenterCapiCertificateExpiring": {
		// Of ten minutes, and not renewed. The standby's is older.
		`karpenter_capi_agent_certificate_not_after_seconds{pod="a",certificate="client"} 7250x120
		 karpenter_capi_agent_certificate_not_before_seconds{pod="a",certificate="client"} 6530x120
		 karpenter_capi_agent_certificate_not_after_seconds{pod="b",certificate="client"} 7000x120
		 karpenter_capi_agent_certificate_not_before_seconds{pod="b",certificate="client"} 6280x120`,
		"shim/internal/identity/metrics_test.go:TestACertificateThatIsNotRenewedIsShownBeforeItExpires",
		[]string{"until-float64(w.clock.Now().Unix()) < min((until-from)/4, (14*24*time.Hour).Seconds())", "require.True(t, expires())"},
	},
	"KarpenterCapiAuthorityExpiring": {
		`karpenter_capi_agent_certificate_not_after_seconds{pod="a",certificate="agent-ca"} 600000x120
		 karpenter_capi_agent_certificate_not_before_seconds{pod="a",certificate="agent-ca"} -300000000x120
		 karpenter_capi_agent_certificate_not_after_seconds{pod="b",certificate="agent-ca"} 0x120
		 karpenter_capi_agent_certificate_not_before_seconds{pod="b",certificate="agent-ca"} 0x120`,
		"shim/internal/identity/metrics_test.go:TestAnAuthorityThatEndsIsShownBeforeItExpires",
		[]string{"until-float64(w.clock.Now().Unix()) < min((until-from)/4, (7*24*time.Hour).Seconds())", "require.True(t, expires())"},
	},
	"KarpenterCapiCertificateUnusable": {
		`karpenter_capi_agent_certificate_reload_errors_total{pod="a",certificate="client"} 0+6x120`,
		"shim/internal/identity/metrics_test.go:TestAStoredCertificateThatCannotBeUsedIsCountedWithEachReading",
		[]string{"require.Greater(t, unusable(), before)"},
	},
	"KarpenterCapiCertificateRefused": {
		`karpenter_capi_agent_certificate_requests_total{pod="a",purpose="enrollment",result="refused"} 1+1x120`,
		"shim/internal/identity/keeper_test.go:TestARefusalIsToldOnceWithWhatToDo",
		[]string{`require.Greater(t, shimtest.Metric(t, "karpenter_capi_agent_certificate_requests_total", refused), before)`},
	},
	"KarpenterCapiLaunchesFail": {
		`karpenter_capi_claims_total{pod="a",result="AgentRefused"} 0+1x120
		 karpenter_capi_claims_total{pod="a",result="no_capacity"} 0+1x120
		 karpenter_capi_claims_total{pod="a",result="claimed"} 0+8x120`,
		"shim/internal/cloudprovider/create_test.go:TestAttemptsToClaimAreCountedByResult",
		[]string{"assert.Greater(t, share, 0.05)"},
	},
	"KarpenterCapiNoCapacity": {
		`karpenter_capi_claims_total{pod="a",result="no_capacity"} 0+1x120`,
		"shim/internal/cloudprovider/create_test.go:TestAttemptsToClaimAreCountedByResult",
		[]string{`assert.InDelta(t, none+1, attempts("no_capacity"), 0)`},
	},
	"KarpenterCapiNodeClaimsGivenUp": {
		`karpenter_capi_node_claims_given_up_total{pod="a",reason="MachineLost"} 0x100 0+1x20`,
		"shim/internal/controllers/failedmachine/controller_test.go:TestAClaimThatEndsCostsItsNodeClaimAtOnce",
		[]string{"assert.Greater(t, givenUp()-before, 3.0)"},
	},
	"KarpenterCapiNodeClaimsWithoutClaim": {
		`karpenter_capi_node_claims_without_claim{pod="a"} 1x120`,
		"shim/internal/controllers/claimsync/controller_test.go:TestNodeClaimsWithoutAClaimAreCounted",
		[]string{`assert.InDelta(t, 1, shimtest.Metric(t, "karpenter_capi_node_claims_without_claim", nil), 0)`},
	},
	"KarpenterCapiClaimsKept": {
		`karpenter_capi_claims_kept_without_node_claim{pod="a"} 1x120`,
		"shim/internal/controllers/claimsync/controller_test.go:TestClaimsWhoseNodesWereRegisteredAreReportedAndKept",
		[]string{`assert.InDelta(t, 1, shimtest.Metric(t, "karpenter_capi_claims_kept_without_node_claim", nil), 0)`},
	},
	"KarpenterCapiProviderIDConflicts": {
		`karpenter_capi_provider_id_conflicts_total{pod="a"} 0x115 1x5`,
		"shim/internal/controllers/providerid/controller_test.go:TestOneRealIDNeverGoesToTwoNodeClaims",
		[]string{`assert.InDelta(t, before+1, shimtest.Metric(t, "karpenter_capi_provider_id_conflicts_total", nil), 0)`},
	},
	"KarpenterCapiAdoptionWaits": {
		`karpenter_capi_node_claims_awaited{pod="a"} 3x120`,
		"shim/internal/controllers/adoption/controller_test.go:TestNothingIsSettledWhileTheAgentIsSilent",
		[]string{`assert.InDelta(t, 1, shimtest.Metric(t, "karpenter_capi_node_claims_awaited", nil), 0)`},
	},
	"KarpenterCapiNoNodeGroups": {
		`karpenter_capi_catalogue_node_groups{pod="a"} 0x120`,
		"shim/internal/catalogue/catalogue_test.go:TestAClusterWithoutNodeGroupsHasAnEmptyCatalogue",
		[]string{`assert.Zero(t, shimtest.Metric(t, "karpenter_capi_catalogue_node_groups", nil))`},
	},
	"KarpenterCapiNodeGroupsUnusable": {
		`karpenter_capi_catalogue_node_groups_unusable{pod="a"} 1x120`,
		"shim/internal/catalogue/catalogue_test.go:TestProblemsOfSelectedGroupsAreTold",
		[]string{`assert.InDelta(t, 1, shimtest.Metric(t, "karpenter_capi_catalogue_node_groups_unusable", nil), 0)`},
	},
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
