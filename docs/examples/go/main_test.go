package main

import (
	"bytes"
	"context"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func TestAMachineIsClaimedAndReleased(t *testing.T) {
	agent := fakeagent.New(fakeagent.WithInfrastructure(fakeagent.Infrastructure{})) // every step happens at once
	defer agent.Close()
	agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "dear", Price: &agentv1alpha1.Price{PerHour: 2}})
	cheap := agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "cheap", Price: &agentv1alpha1.Price{PerHour: 1}})
	agent.FailAfter("CreateClaim", 1, agenterrors.HubUnreachable("the reply was lost"))

	var out bytes.Buffer
	if err := live(t, agent, "", &out); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"candidates: default/cheap, default/dear\n", "claimed from: default/cheap\n", "CLAIM_PHASE_ENDED Released\n"} {
		if !strings.Contains(out.String(), line) {
			t.Errorf("%q is missing in:\n%s", line, &out)
		}
	}
	if replicas := agent.NodeGroup(cheap).GetReplicas(); replicas != 0 {
		t.Errorf("%d replicas are left", replicas)
	}
}

func TestAClaimIsRejected(t *testing.T) {
	agent := fakeagent.New()
	defer agent.Close()
	full := agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "full", MaxSize: new(int32)})

	var out bytes.Buffer
	if err := live(t, agent, full, &out); !agenterrors.IsNoRoom(err) {
		t.Fatalf("%v is not the expected error", err)
	}
	if want := "rejected: default/full: UNAVAILABLE_REASON_AT_MAX_SIZE: "; !strings.HasPrefix(out.String(), want) {
		t.Errorf("got %q, want %q and a message", &out, want)
	}
}

// TestAnInterruptedClaimIsReleased ends the example while every answer to CreateClaim is lost.
func TestAnInterruptedClaimIsReleased(t *testing.T) {
	agent := fakeagent.New(fakeagent.WithInfrastructure(fakeagent.Infrastructure{}))
	defer agent.Close()
	group := agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "standard"})
	agent.FailAfter("CreateClaim", fakeagent.Always, agenterrors.HubUnreachable("the reply was lost"))

	ctx, interrupt := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, agent.Client(), fakeagent.DefaultCluster(), "a-claim", group, &bytes.Buffer{})
	}()
	for agent.NodeGroup(group).GetReplicas() == 0 {
		if err := t.Context().Err(); err != nil {
			t.Fatal(err)
		}
		runtime.Gosched()
	}
	interrupt()
	if err := <-ended; err == nil {
		t.Error("the interruption is not reported")
	}
	if replicas := agent.NodeGroup(group).GetReplicas(); replicas != 0 {
		t.Errorf("%d replicas are left", replicas)
	}
}

func live(t *testing.T, agent *fakeagent.Agent, nodeGroup string, out *bytes.Buffer) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	return run(ctx, agent.Client(), fakeagent.DefaultCluster(), "a-claim", nodeGroup, out)
}
