package dashboards_test

import (
	"bytes"
	"fmt"
	"image/png"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/dashboards"
)

// Every panel of every dashboard is evaluated, and those whose metrics were recorded have a value.
func TestDashboardsArePlotted(t *testing.T) {
	_ = os.Getenv("TESTED_CHARTS") // declares the charts' dashboards as inputs of the test cache
	scrapes := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			http.Error(w, "it was killed", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintf(w, "capi_agent_build_info 1\ncapi_agent_claims{namespace=\"fleet\",machine_deployment=\"a\",phase=\"Bound\"} %d\n", scrapes)
		fmt.Fprintf(w, "karpenter_capi_claims_total{result=\"Created\"} %d\n", 3*scrapes)
		if scrapes > 12 { // the counters appear with what they have counted
			fmt.Fprint(w, "karpenter_nodeclaims_created_total{nodepool=\"default\",reason=\"provisioned\"} 11\n")
		}
		// These were counted before the recording.
		fmt.Fprint(w, "karpenter_nodeclaims_disrupted_total{nodepool=\"default\",reason=\"empty\"} 5\n")
		fmt.Fprint(w, "karpenter_capi_claim_sync_errors_total 0\n")
	}))
	defer server.Close()
	recording, began := dashboards.NewRecording(), time.Unix(1700000000, 0)
	for ; scrapes < 30; scrapes++ {
		require.NoError(t, recording.Scrape(t.Context(), began.Add(time.Duration(scrapes)*dashboards.Interval),
			dashboards.Source{Pod: "agent", Job: "capi-agent", URL: func() string { return server.URL + "/metrics" }},
			dashboards.Source{Pod: "agent-2", Job: "capi-agent", URL: func() string { return server.URL + "/gone" }},
		))
	}
	all, err := dashboards.Read("../..")
	require.NoError(t, err)
	require.Len(t, all, 2)
	valued := map[string][]string{"karpenter-capi-hub": {"Agents", "Claims by phase"}, "karpenter-capi-spoke": {"Claim attempts", "NodeClaims created"}}
	for _, d := range all {
		var picture bytes.Buffer
		empty, zero, err := recording.Draw(t.Context(), d, &picture)
		require.NoError(t, err)
		image, err := png.Decode(&picture)
		require.NoError(t, err)
		require.Greater(t, image.Bounds().Dx(), 1000)
		for _, panel := range valued[d.Name] {
			require.NotContains(t, empty, panel)
			require.NotContains(t, zero, panel)
		}
		if d.Name == "karpenter-capi-spoke" {
			require.Equal(t, []string{"NodeClaims disrupted", "Claim sync"}, zero)
			require.ErrorContains(t, d.Missing(empty, zero), "has nothing but zeros in: NodeClaims disrupted")
			require.NotContains(t, d.Missing(empty, zero).Error(), "Claim sync", "no synchronization needs to fail")
		}
		require.Contains(t, empty, "Memory", "nothing of it was recorded")
		require.ErrorContains(t, d.Missing(empty, zero), "Memory")
	}
}

func TestOnlyPanelsAboutFailuresMayBeEmpty(t *testing.T) {
	_ = os.Getenv("TESTED_CHARTS") // declares the charts' dashboards as inputs of the test cache
	all, err := dashboards.Read("../..")
	require.NoError(t, err)
	for _, d := range all {
		titles := lo.Map(d.Panels, func(p dashboards.Panel, _ int) string { return p.Title })
		require.Subset(t, titles, d.MayBeZero(), "every panel that may be empty or zero is one of the dashboard's")
		require.NoError(t, d.Missing(d.MayBeEmpty(), d.MayBeZero()))
		require.EqualError(t, d.Missing(append([]string{"Memory"}, d.MayBeEmpty()...), nil), d.Name+" has no data in: Memory")
		require.EqualError(t, d.Missing(nil, append([]string{"Claim attempts"}, d.MayBeZero()...)), d.Name+" has nothing but zeros in: Claim attempts")
	}
}

func TestPicturesShowTheDashboardsAsTheyAre(t *testing.T) {
	_, _ = os.Getenv("TESTED_CHARTS"), os.Getenv("TESTED_DOCS") // declares the dashboards and their pictures as inputs of the test cache
	all, err := dashboards.Read("../..")
	require.NoError(t, err)
	digests, err := dashboards.Digests(all)
	require.NoError(t, err)
	drawn, err := os.ReadFile("../../docs/images/" + dashboards.DigestsFile)
	require.NoError(t, err)
	require.Equal(t, digests, string(drawn), "run make dashboards, look at the pictures in docs/images, and commit them")
}
