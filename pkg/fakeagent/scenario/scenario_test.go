package scenario_test

import (
	"context"
	"fmt"
	"net"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent/scenario"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const patience = 10 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func spoke() *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "spoke"}
}

// play starts the scenario with a clock that does not advance.
func play(t *testing.T, text string) (*scenario.Play, *clocktesting.FakeClock) {
	t.Helper()
	parsed, err := scenario.Parse([]byte(text))
	require.NoError(t, err)
	clock := clocktesting.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	p, err := parsed.Start(scenario.Options{Clock: clock})
	require.NoError(t, err)
	t.Cleanup(p.Close)
	return p, clock
}

func create(t *testing.T, p *scenario.Play, id, group string) error {
	t.Helper()
	_, err := p.Agent.Client().Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
		Cluster: spoke(), ClaimId: id, Holder: "karpenter", Candidates: []string{"fleet/" + group},
	})
	return err
}

func eventually(t *testing.T, check func() bool) {
	t.Helper()
	require.Eventually(t, check, patience, time.Millisecond)
}

// The example documents every field of the file.
func TestTheExampleUsesEveryField(t *testing.T) {
	var written map[string]any
	require.NoError(t, yaml.Unmarshal(scenario.Example(), &written))
	require.Empty(t, unused(reflect.TypeFor[scenario.Scenario](), []any{written}, ""))
	_, err := scenario.Parse(scenario.Example())
	require.NoError(t, err)
}

// unused returns the fields of a type that none of the values sets.
func unused(of reflect.Type, values []any, path string) []string {
	for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct {
		return nil
	}
	var missing []string
	for field := range of.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		var found []any
		for _, value := range values {
			object, ok := value.(map[string]any)
			if !ok {
				continue
			}
			switch inner := object[name].(type) {
			case nil:
			case []any:
				found = append(found, inner...)
			default:
				found = append(found, inner)
			}
		}
		if len(found) == 0 {
			missing = append(missing, path+name)
		}
		missing = append(missing, unused(field.Type, found, path+name+".")...)
	}
	return missing
}

func TestTheExampleIsPlayed(t *testing.T) {
	p, clock := play(t, string(scenario.Example()))
	group := p.Agent.NodeGroup("fleet/gpu-spot")
	require.Equal(t, "g5.xlarge", group.GetInstanceType())
	require.Equal(t, "16Gi", group.GetCapacity()["memory"])
	require.Equal(t, "500Mi", group.GetOverhead()["memory"])
	require.Equal(t, "gpu", group.GetNodeLabels()["pool"])
	require.Equal(t, "ml", group.GetLabels()["team"])
	require.Equal(t, "nvidia.com/gpu", group.GetTaints()[0].GetKey())
	require.Equal(t, agentv1alpha1.CapacityType_CAPACITY_TYPE_SPOT, group.GetCapacityType())
	require.InDelta(t, 0.42, group.GetPrice().GetPerHour(), 0)
	require.EqualValues(t, 10, group.GetMaxSize())
	require.EqualValues(t, 1, group.GetReplicas())
	require.True(t, group.GetAvailability().GetAvailable())
	require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_QUOTA_EXCEEDED,
		p.Agent.NodeGroup("fleet/full").GetAvailability().GetReason())
	require.True(t, agenterrors.IsNoRoom(create(t, p, "none", "full")))

	machine := func(id string) *agentv1alpha1.Machine { return p.Agent.Claim(spoke(), id).GetMachine() }
	for _, id := range []string{"first", "second"} { // one after the other, so that the second machine is the second claim's
		require.NoError(t, create(t, p, id, "gpu-spot"))
		require.Nil(t, machine(id))
		clock.Step(500 * time.Millisecond)
		eventually(t, func() bool { return machine(id) != nil })
	}
	clock.Step(3 * time.Second)
	eventually(t, func() bool { return p.Agent.Claim(spoke(), "second").GetReason() == "Failed" })
	require.Equal(t, "InsufficientInstanceCapacity", machine("second").GetInfrastructureReason())
	require.True(t, agenterrors.IsNoRoom(create(t, p, "third", "gpu-spot")), "it cools down")
	clock.Step(1500 * time.Millisecond)
	eventually(t, func() bool { return machine("first").GetProviderId() != "" })
	clock.Step(5 * time.Second)
	eventually(t, func() bool { return machine("first").GetNodeName() != "" })

	release := func() error {
		_, err := p.Agent.Client().Claims.ReleaseClaim(t.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: spoke(), ClaimId: "first", Drained: true})
		return err
	}
	require.Equal(t, codes.Unavailable, status.Code(release()), "the reply is lost")
	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING, p.Agent.Claim(spoke(), "first").GetPhase())
	require.NoError(t, release())
	require.Len(t, p.Grants("spiffe://karpenter-capi/team/observability"), 1)
	require.Empty(t, p.Grants("spiffe://karpenter-capi/team/other"))
}

const plain = "clusters:\n- name: fleet/spoke\nnodeGroups:\n- name: workers\n"

func list(ctx context.Context, c *client.Client) error {
	_, err := c.NodeGroups.ListNodeGroups(ctx, &agentv1alpha1.ListNodeGroupsRequest{Cluster: spoke()})
	return err
}

func TestNodePoolSetsArePublished(t *testing.T) {
	p, _ := play(t, string(scenario.Example()))
	response, err := p.Agent.ClientFor(spoke()).NodePools.ListPublishedObjects(t.Context(),
		&agentv1alpha1.ListPublishedObjectsRequest{Cluster: spoke()})
	require.NoError(t, err)
	require.Equal(t, []string{"fleet"}, response.GetSets())
	require.Len(t, response.GetObjects(), 3)
	class, pool, invalid := response.GetObjects()[0], response.GetObjects()[1], response.GetObjects()[2]
	require.Equal(t, "ClusterAPINodeClass/default", client.PublishedKey(class))
	require.Equal(t, "NodePool/default", client.PublishedKey(pool))
	require.Equal(t, map[string]string{"team": "platform"}, pool.GetLabels())
	require.Equal(t, map[string]string{"example.com/owner": "the platform team"}, pool.GetAnnotations())
	require.Equal(t, agentv1alpha1.DeletionPolicy_DELETION_POLICY_DELETE, pool.GetDeletionPolicy())
	require.JSONEq(t, `{"weight": 10, "template": {"spec": {
		"nodeClassRef": {"group": "karpenter.cluster.x-k8s.io", "kind": "ClusterAPINodeClass", "name": "default"},
		"requirements": [{"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["spot", "on-demand"]}]}}}`, pool.GetSpecJson())
	require.Contains(t, invalid.GetProblem(), "spec.nodePools[1].labels[team]: ")
	require.Empty(t, invalid.GetSpecJson())
}

func TestTheFirstOfTwoNodePoolSetsPublishes(t *testing.T) {
	p, _ := play(t, plain+`nodePoolSets:
- {name: second, nodePools: [{name: default, spec: {weight: 1}}]}
- {name: first, nodePools: [{name: default, spec: {weight: 2}}]}
`)
	response, err := p.Agent.Client().NodePools.ListPublishedObjects(t.Context(), &agentv1alpha1.ListPublishedObjectsRequest{Cluster: spoke()})
	require.NoError(t, err)
	require.Equal(t, []string{"first", "second"}, response.GetSets())
	require.Len(t, response.GetObjects(), 1)
	require.Equal(t, "second", response.GetObjects()[0].GetSet())
}

func TestOutagesBeginAndEnd(t *testing.T) {
	p, clock := play(t, plain+"outages:\n- {kind: unavailable, after: 1m, lasts: 10s, every: 1h}\n")
	answered := func() error { return list(t.Context(), p.Agent.Client()) }
	stream, err := p.Agent.Client().Claims.WatchClaims(t.Context(), &agentv1alpha1.WatchClaimsRequest{Cluster: spoke()})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	wait := time.Minute
	for range 2 {
		require.NoError(t, answered())
		eventually(t, clock.HasWaiters)
		clock.Step(wait)
		eventually(t, func() bool { return agenterrors.ReasonOf(answered()) == agenterrors.ReasonNotSynced })
		clock.Step(10 * time.Second)
		eventually(t, func() bool { return answered() == nil })
		wait = time.Hour - 10*time.Second
	}
	for err == nil {
		_, err = stream.Recv()
	}
	require.Equal(t, codes.Unavailable, status.Code(err))
}

func TestASilentAgentDoesNotAnswer(t *testing.T) {
	p, clock := play(t, plain+"outages:\n- {kind: silent, after: 1m, lasts: 10s}\n")
	require.NoError(t, list(t.Context(), p.Agent.Client()))
	clock.Step(time.Minute)
	eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		return status.Code(list(ctx, p.Agent.Client())) == codes.DeadlineExceeded
	})
	clock.Step(10 * time.Second)
	eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		return list(ctx, p.Agent.Client()) == nil
	})
}

func TestADisconnectedAgentClosesConnections(t *testing.T) {
	p, clock := play(t, plain+"outages:\n- {kind: disconnected, after: 1m, lasts: 10s}\n")
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p.Agent.Serve(p.Listener(listener))
	c, err := client.New(client.Options{Address: listener.Addr().String(), PlaintextLoopback: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	require.NoError(t, list(t.Context(), c))
	clock.Step(time.Minute)
	eventually(t, func() bool { return agenterrors.IsUnavailable(list(t.Context(), c)) })
	clock.Step(10 * time.Second)
	eventually(t, func() bool { return list(t.Context(), c) == nil })
}

func TestStepsThatDoNotHappen(t *testing.T) {
	p, clock := play(t, plain+"machines: {node: never}\n")
	require.NoError(t, create(t, p, "a-claim", "workers"))
	clock.Step(24 * time.Hour)
	machine := p.Agent.Claim(spoke(), "a-claim").GetMachine()
	require.NotEmpty(t, machine.GetProviderId())
	require.Empty(t, machine.GetNodeName())
}

func TestMistakesAreNamed(t *testing.T) {
	for want, text := range map[string]string{
		"calls[1].method: calls[0] is about ReleaseClaim, too": "calls:\n- {method: ReleaseClaim, delay: 1s}\n- {method: ReleaseClaim, delay: 2s}\n",
		"not YAML":                                                     "nodeGroups: [",
		"not a scenario":                                               "- a\n",
		`unknown field "nodeGroup"`:                                    "nodeGroup: []\n",
		`unknown field "nodeGroups[0].size"`:                           "nodeGroups:\n- {name: a, size: 3}\n",
		`key "name" already set in map`:                                "nodeGroups:\n- name: a\n  name: b\n",
		"nodeGroups.replicas of type int32":                            "nodeGroups:\n- {name: a, replicas: many}\n",
		`trustDomain: "A/b" is not a trust domain`:                     "trustDomain: A/b\n",
		`heartbeatInterval: "soon" is not a duration`:                  "heartbeatInterval: soon\n",
		"heartbeatInterval: is 0":                                      "heartbeatInterval: 0s\n",
		"spareGracePeriod: -1s is negative":                            "spareGracePeriod: -1s\n",
		`machines.node: "5" is not a duration`:                         "machines: {node: \"5\"}\n",
		`clusters[0].name: "spoke" is not <namespace>/<name>`:          "clusters:\n- name: spoke\n",
		"clusters[1].name: there is another Cluster a/b":               "clusters:\n- name: a/b\n- name: a/b\n",
		`clusters[0].onboarding: "A" is not an id`:                     "clusters:\n- {name: a/b, onboarding: A}\n",
		`clusters[1].onboarding: "x" is that of another`:               "clusters:\n- {name: a/b, onboarding: x}\n- {name: a/c, onboarding: x}\n",
		`nodeGroups[0].name: "" is not a name`:                         "nodeGroups:\n- zone: a\n",
		"nodeGroups[1].name: there is another":                         "nodeGroups:\n- name: a\n- name: a\n",
		"nodeGroups[0].cluster: is missing, and there are 2":           "clusters:\n- name: a/b\n- name: a/c\nnodeGroups:\n- name: a\n",
		`nodeGroups[0].cluster: "a/d" is not one of the Clusters: a/b`: "clusters:\n- name: a/b\nnodeGroups:\n- {name: a, cluster: a/d}\n",
		`nodeGroups[0].capacity[cpu]: "lots" is not a quantity`:        group("capacity: {cpu: lots}"),
		"nodeGroups[0].overhead[memory]":                               group("overhead: {memory: -1}"),
		"nodeGroups[0].nodeLabels[a b]":                                group("nodeLabels: {a b: c}"),
		"nodeGroups[0].labels[a]":                                      group("labels: {a: \"b c\"}"),
		"nodeGroups[0].taints[0]":                                      group("taints: [{key: a, effect: Never}]"),
		"nodeGroups[0].capacityType":                                   group("capacityType: cheap"),
		"nodeGroups[0].pricePerHour: -1 is not a price":                group("pricePerHour: -1"),
		"nodeGroups[0].currency: there is no price":                    group("currency: USD"),
		"nodeGroups[0].minSize: -1 is negative":                        group("minSize: -1"),
		"nodeGroups[0].maxSize: 1 is less than minSize":                group("minSize: 2, maxSize: 1"),
		"nodeGroups[0].replicas: -1 is negative":                       group("replicas: -1"),
		"nodeGroups[0].replicas: 1000000 is more than":                 group("replicas: 1000000"),
		"nodeGroups[0].replicas: 3 is more than maxSize":               group("replicas: 3, maxSize: 2"),
		`nodeGroups[0].unavailable: "FULL" is not one of AT_MAX_SIZE,`: group("unavailable: FULL"),
		`nodeGroups[0].machines.deletion: "x"`:                         group("machines: {deletion: x}"),
		"nodeGroups[0].failures[0].stage":                              group("failures: [{machine: 1, stage: boot}]"),
		"nodeGroups[0].failures[0].machine: set either":                group("failures: [{stage: node}]"),
		"nodeGroups[0].failures[0].after: is 0":                        group("failures: [{machine: 1, stage: node, after: 0s}]"),
		"nodeGroups[0].failures[0].outcome":                            group("failures: [{machine: 1, stage: node, outcome: worse}]"),
		`nodePoolSets[1].name: "A" is not a name`:                      poolSet("name: A, nodePools: [{name: b, spec: {}}]"),
		"nodePoolSets[1].name: there is another NodePoolSet a":         poolSet("name: a, nodePools: [{name: b, spec: {}}]"),
		`nodePoolSets[1].cluster: "a/d" is not one of the Clusters`:    poolSet("name: b, cluster: a/d, nodePools: [{name: b, spec: {}}]"),
		"nodePoolSets[1]: has neither nodePools nor nodeClasses":       poolSet("name: b"),
		`nodePoolSets[1].deletionPolicy: "Keep" is not one of`:         poolSet("name: b, deletionPolicy: Keep, nodePools: [{name: b, spec: {}}]"),
		`nodePoolSets[1].nodePools[0].name: "B" is not a name`:         poolSet("name: b, nodePools: [{name: B, spec: {}}]"),
		"nodePoolSets[1].nodeClasses[1].name: there is another":        poolSet("name: b, nodeClasses: [{name: b, spec: {}}, {name: b, spec: {}}]"),
		"nodePoolSets[1].nodePools[0].spec: is missing":                poolSet("name: b, nodePools: [{name: b}]"),
		"nodePoolSets[1].nodeClasses[0].spec: not a JSON object":       poolSet("name: b, nodeClasses: [{name: b, spec: [1]}]"),
		"nodePoolSets[1].nodePools[0].labels[karpenter.cluster":        poolSet("name: b, nodePools: [{name: b, labels: {" + reserved + ": a}, spec: {}}]"),
		"identities[0].id":                                             identity("id: spiffe://elsewhere/a"),
		"a Cluster's own id":                                           identity("id: spiffe://karpenter-capi/cluster/a/b"),
		`identities[0].name: "cluster" is not a name of a folder`:      identity("name: cluster"),
		"identities[0].roles: is empty":                                identity("roles: []"),
		`identities[0].roles[0]: "cluster" is not one of`:              identity("roles: [cluster]"),
		"identities[0].clusters: name at least one":                    identity("allClusters: false"),
		`calls[0].method: "Claim" is not one of CreateClaim`:           "calls:\n- {method: Claim, delay: 1s}\n",
		"calls[0]: has neither delay nor fail":                         "calls:\n- method: GetClaim\n",
		`calls[0].delay: "x" is not a duration`:                        "calls:\n- {method: GetClaim, delay: x}\n",
		"calls[0].fail: set either reason or code":                     "calls:\n- {method: GetClaim, fail: {times: 1}}\n",
		`calls[0].fail.reason: "TIRED" is not one of CLUSTER_PAUSED`:   "calls:\n- {method: GetClaim, fail: {reason: TIRED}}\n",
		`calls[0].fail.code: "BAD" is not an error code`:               "calls:\n- {method: GetClaim, fail: {code: BAD}}\n",
		"calls[0].fail.times: -1 is negative":                          "calls:\n- {method: GetClaim, fail: {code: INTERNAL, times: -1}}\n",
		`outages[0].kind: "rain" is not one of unavailable, silent`:    "outages:\n- {kind: rain, lasts: 1s}\n",
		"outages[0].lasts: is missing":                                 "outages:\n- kind: silent\n",
		"outages[0].every: 1s is not longer than lasts":                "outages:\n- {kind: silent, lasts: 1s, every: 1s}\n",
	} {
		_, err := scenario.Parse([]byte(text))
		require.ErrorContains(t, err, want, text)
	}
}

func TestEveryMistakeIsNamed(t *testing.T) {
	_, err := scenario.Parse([]byte("heartbeatInterval: x\noutages:\n- kind: rain\n"))
	require.EqualError(t, err, `heartbeatInterval: "x" is not a duration; write for example 90s or 1m30s
outages[0].lasts: is missing or 0; write how long it lasts
outages[0].kind: "rain" is not one of unavailable, silent, disconnected`)
}

func group(fields string) string { return fmt.Sprintf("nodeGroups:\n- {name: a, %s}\n", fields) }

const reserved = "karpenter.cluster.x-k8s.io/published-by"

// poolSet returns a NodePoolSet after a valid one with the name a.
func poolSet(fields string) string {
	return fmt.Sprintf("nodePoolSets:\n- {name: a, nodePools: [{name: b, spec: {}}]}\n- {%s}\n", fields)
}

// identity returns an identity that is valid except for the field.
func identity(field string) string {
	fields := map[string]string{
		"id": "spiffe://karpenter-capi/a", "name": "a", "roles": "[reader]", "allClusters": "true",
	}
	name, value, _ := strings.Cut(field, ": ")
	fields[name] = value
	return fmt.Sprintf("identities:\n- {id: %q, name: %s, roles: %s, allClusters: %s}\n",
		fields["id"], fields["name"], fields["roles"], fields["allClusters"])
}
