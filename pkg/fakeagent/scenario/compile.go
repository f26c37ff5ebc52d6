package scenario

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// never is the delay of a step that does not happen.
const never = "never"

// compiled is a scenario in the fake agent's types.
type compiled struct {
	options    []fakeagent.Option
	paused     []*agentv1alpha1.ClusterRef
	onboarded  map[string]*agentv1alpha1.ClusterRef // by the ID of the onboarding
	nodeGroups []nodeGroup
	// nodePoolSets are the NodePoolSets, the oldest first.
	nodePoolSets []fakeagent.NodePoolSet
	grants       map[string][]fakeagent.Grant
	calls        []call
	outages      []outage
}

type nodeGroup struct {
	described *agentv1alpha1.NodeGroup
	pace      *fakeagent.Infrastructure
	failures  []fakeagent.MachineFailure
}

type call struct {
	method string
	delay  time.Duration
	err    error // nil if it does not fail
	times  int
	lost   bool
}

type outage struct {
	after, lasts, every time.Duration
	kind                string
}

// Kinds of outages.
const (
	unavailable  = "unavailable"
	silent       = "silent"
	disconnected = "disconnected"
)

// compiler collects the mistakes of a scenario.
type compiler struct {
	errs []error
}

func (c *compiler) wrong(field, format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf("%s: %s", field, fmt.Sprintf(format, args...)))
}

// duration returns the field's value, or standard if it is empty or invalid.
func (c *compiler) duration(field, text string, standard time.Duration) time.Duration {
	if text == "" {
		return standard
	}
	d, err := time.ParseDuration(text)
	switch {
	case err != nil:
		c.wrong(field, "%q is not a duration; write for example 90s or 1m30s", text)
	case d < 0:
		c.wrong(field, "%s is negative", text)
	default:
		return d
	}
	return standard
}

func (c *compiler) step(field, text string) time.Duration {
	if text == never {
		return fakeagent.Manual
	}
	return c.duration(field, text, 0)
}

func (c *compiler) pace(field string, p Pace) fakeagent.Infrastructure {
	return fakeagent.Infrastructure{
		Appear:    c.step(field+".object", p.Object),
		Provision: c.step(field+".providerID", p.ProviderID),
		Join:      c.step(field+".node", p.Node),
		Terminate: c.step(field+".deletion", p.Deletion),
	}
}

// cluster returns the Cluster that the text names, or nil if it names none.
func (c *compiler) cluster(field, text string) *agentv1alpha1.ClusterRef {
	namespace, name, found := strings.Cut(text, "/")
	if !found || len(validation.IsDNS1123Label(namespace)) > 0 || len(name) > 63 || len(validation.IsDNS1123Subdomain(name)) > 0 {
		c.wrong(field, "%q is not <namespace>/<name>, both in lower case", text)
		return nil
	}
	return &agentv1alpha1.ClusterRef{Namespace: namespace, Name: name}
}

// compile returns the scenario in the fake agent's types, or an error with every mistake in it.
func (s *Scenario) compile() (*compiled, error) {
	c := &compiler{}
	domain := cmp.Or(s.TrustDomain, fakeagent.TrustDomain)
	if len(validation.IsDNS1123Subdomain(domain)) > 0 {
		c.wrong("trustDomain", "%q is not a trust domain; write a name in lower case, such as example.org", domain)
	}
	heartbeat := c.duration("heartbeatInterval", s.HeartbeatInterval, 10*time.Second)
	if heartbeat == 0 {
		c.wrong("heartbeatInterval", "is 0; streams need heartbeats")
	}
	out := &compiled{onboarded: map[string]*agentv1alpha1.ClusterRef{}, grants: map[string][]fakeagent.Grant{}}
	clusters := s.clusters(c, out)
	out.options = []fakeagent.Option{
		fakeagent.WithTrustDomain(domain),
		fakeagent.WithHeartbeatInterval(heartbeat),
		fakeagent.WithSpareGracePeriod(c.duration("spareGracePeriod", s.SpareGracePeriod, 0)),
		fakeagent.WithCoolDown(c.duration("failureCoolDown", s.FailureCoolDown, 3*time.Minute)),
		fakeagent.WithInfrastructure(c.pace("machines", s.Machines)),
		fakeagent.WithClusters(slices.Collect(maps.Values(clusters))...),
	}
	seen := map[string]bool{}
	for i, g := range s.NodeGroups {
		field := fmt.Sprintf("nodeGroups[%d]", i)
		group := g.compile(c, field, clusters)
		if id := group.described.GetCluster().GetNamespace() + "/" + g.Name; group.described.GetCluster() != nil {
			if seen[id] {
				c.wrong(field+".name", "there is another node group %s; names are unique in a namespace", id)
			}
			seen[id] = true
		}
		out.nodeGroups = append(out.nodeGroups, group)
	}
	s.nodePoolSets(c, out, clusters)
	s.identities(c, out, domain)
	methods := map[string]int{}
	for i, one := range s.Calls {
		field := fmt.Sprintf("calls[%d]", i)
		if first, again := methods[one.Method]; again {
			c.wrong(field+".method", "calls[%d] is about %s, too; write both into one entry", first, one.Method)
		} else {
			methods[one.Method] = i
		}
		out.calls = append(out.calls, one.compile(c, field))
	}
	for i, one := range s.Outages {
		out.outages = append(out.outages, one.compile(c, fmt.Sprintf("outages[%d]", i)))
	}
	if err := errors.Join(c.errs...); err != nil {
		return nil, err
	}
	return out, nil
}

// clusters returns the scenario's Clusters by name.
func (s *Scenario) clusters(c *compiler, out *compiled) map[string]*agentv1alpha1.ClusterRef {
	if len(s.Clusters) == 0 {
		standard := fakeagent.DefaultCluster()
		return map[string]*agentv1alpha1.ClusterRef{standard.GetNamespace() + "/" + standard.GetName(): standard}
	}
	clusters := map[string]*agentv1alpha1.ClusterRef{}
	for i, one := range s.Clusters {
		field := fmt.Sprintf("clusters[%d]", i)
		ref := c.cluster(field+".name", one.Name)
		if ref == nil {
			continue
		}
		if clusters[one.Name] != nil {
			c.wrong(field+".name", "there is another Cluster %s", one.Name)
		}
		clusters[one.Name] = ref
		if one.Paused {
			out.paused = append(out.paused, ref)
		}
		if one.Onboarding != "" {
			if len(validation.IsDNS1123Label(one.Onboarding)) > 0 {
				c.wrong(field+".onboarding", "%q is not an id; write lower case letters, digits and hyphens", one.Onboarding)
			}
			if out.onboarded[one.Onboarding] != nil {
				c.wrong(field+".onboarding", "%q is that of another Cluster too", one.Onboarding)
			}
			out.onboarded[one.Onboarding] = ref
		}
	}
	return clusters
}

func (g NodeGroup) compile(c *compiler, field string, clusters map[string]*agentv1alpha1.ClusterRef) nodeGroup {
	if problems := validation.IsDNS1123Subdomain(g.Name); len(problems) > 0 {
		c.wrong(field+".name", "%q is not a name of a MachineDeployment: %s", g.Name, problems[0])
	}
	described := &agentv1alpha1.NodeGroup{
		Name: g.Name, Labels: g.Labels, InstanceType: g.InstanceType,
		Capacity: quantities(g.Capacity), Overhead: quantities(g.Overhead), NodeLabels: g.NodeLabels,
		Architecture: g.Architecture, OperatingSystem: g.OperatingSystem, Zone: g.Zone, Region: g.Region, MinSize: g.MinSize, MaxSize: g.MaxSize,
		Replicas: g.Replicas, KubernetesVersion: g.KubernetesVersion, Sources: map[string]*agentv1alpha1.ValueSource{},
	}
	described.Cluster = c.clusterOf(field+".cluster", g.Cluster, clusters)
	source := &agentv1alpha1.ValueSource{Kind: agentv1alpha1.SourceKind_SOURCE_KIND_ANNOTATION, Detail: "the scenario"}
	for of, amounts := range map[string]map[string]Quantity{"capacity": g.Capacity, "overhead": g.Overhead} {
		for _, name := range slices.Sorted(maps.Keys(amounts)) {
			if _, err := wire.Quantity(string(amounts[name])); err != nil {
				c.wrong(fmt.Sprintf("%s.%s[%s]", field, of, name), "%v", err)
			}
			described.Sources[of+"."+name] = source
		}
	}
	for of, labels := range map[string]map[string]string{"labels": g.Labels, "nodeLabels": g.NodeLabels} {
		for _, key := range slices.Sorted(maps.Keys(labels)) {
			if problems := slices.Concat(validation.IsQualifiedName(key), validation.IsValidLabelValue(labels[key])); len(problems) > 0 {
				c.wrong(fmt.Sprintf("%s.%s[%s]", field, of, key), "%s", problems[0])
			}
		}
	}
	for i, t := range g.Taints {
		taint := &agentv1alpha1.Taint{Key: t.Key, Value: t.Value, Effect: t.Effect}
		if _, err := wire.Taint(taint); err != nil {
			c.wrong(fmt.Sprintf("%s.taints[%d]", field, i), "%v", err)
		}
		described.Taints = append(described.Taints, taint)
	}
	if g.CapacityType != "" {
		capacityType, err := wire.ParseCapacityType(g.CapacityType)
		if err != nil {
			c.wrong(field+".capacityType", "%v", err)
		}
		described.CapacityType = capacityType
	}
	switch price := g.PricePerHour; {
	case price == nil && g.Currency != "":
		c.wrong(field+".currency", "there is no price; set pricePerHour")
	case price == nil:
	case *price < 0 || math.IsNaN(*price) || math.IsInf(*price, 0):
		c.wrong(field+".pricePerHour", "%v is not a price; write a number, 0 or more", *price)
	default:
		described.Price = &agentv1alpha1.Price{PerHour: *price, Currency: g.Currency}
		described.Sources["price"] = source
	}
	g.sizes(c, field)
	if g.Unavailable != "" {
		reason, known := agentv1alpha1.UnavailableReason_value["UNAVAILABLE_REASON_"+g.Unavailable]
		if !known || reason == 0 {
			c.wrong(field+".unavailable", "%q is not one of %s", g.Unavailable, strings.Join(unavailableReasons(), ", "))
		}
		described.Availability = &agentv1alpha1.Availability{
			Reason: agentv1alpha1.UnavailableReason(reason), Message: "the scenario says so",
		}
	}
	compiled := nodeGroup{described: described}
	if g.Machines != nil {
		pace := c.pace(field+".machines", *g.Machines)
		compiled.pace = &pace
	}
	for i, f := range g.Failures {
		at := fmt.Sprintf("%s.failures[%d]", field, i)
		failure := fakeagent.MachineFailure{
			Machine: f.Machine, Every: f.Every, Stage: fakeagent.Stage(f.Stage), After: c.duration(at+".after", f.After, fakeagent.DefaultFailureDelay),
			Reason: f.Reason, Message: f.Message, Outcome: fakeagent.Outcome(f.Outcome),
		}
		if failure.After == 0 {
			c.wrong(at+".after", "is 0; a failure takes a moment")
		}
		if err := failure.Validate(); err != nil && failure.After >= 0 {
			c.errs = append(c.errs, fmt.Errorf("%s.%w", at, err))
		}
		compiled.failures = append(compiled.failures, failure)
	}
	return compiled
}

// clusterOf returns the scenario's Cluster of that name. Without a name it is the only one.
func (c *compiler) clusterOf(field, name string, clusters map[string]*agentv1alpha1.ClusterRef) *agentv1alpha1.ClusterRef {
	if name == "" && len(clusters) == 1 {
		for _, only := range clusters {
			return only
		}
	}
	ref, known := clusters[name]
	switch {
	case name == "":
		c.wrong(field, "is missing, and there are %d Clusters; name one of %s", len(clusters), strings.Join(slices.Sorted(maps.Keys(clusters)), ", "))
	case !known:
		c.wrong(field, "%q is not one of the Clusters: %s", name, strings.Join(slices.Sorted(maps.Keys(clusters)), ", "))
	}
	return ref
}

// nodePoolSets compiles the NodePoolSets, in their order.
func (s *Scenario) nodePoolSets(c *compiler, out *compiled, clusters map[string]*agentv1alpha1.ClusterRef) {
	seen := map[string]bool{}
	for i, one := range s.NodePoolSets {
		field := fmt.Sprintf("nodePoolSets[%d]", i)
		set := fakeagent.NodePoolSet{
			Name: one.Name, Cluster: c.clusterOf(field+".cluster", one.Cluster, clusters),
			DeletionPolicy: fakeagent.DeletionPolicy(one.DeletionPolicy),
			NodePools:      one.NodePools, NodeClasses: one.NodeClasses,
		}
		if err := set.Validate(); err != nil {
			c.errs = append(c.errs, fmt.Errorf("%s.%w", field, err))
		}
		if len(one.NodePools)+len(one.NodeClasses) == 0 {
			c.wrong(field, "has neither nodePools nor nodeClasses")
		}
		if id := set.Cluster.GetNamespace() + "/" + set.Cluster.GetName() + "/" + one.Name; set.Cluster != nil {
			if seen[id] {
				c.wrong(field+".name", "there is another NodePoolSet %s of this Cluster", one.Name)
			}
			seen[id] = true
		}
		out.nodePoolSets = append(out.nodePoolSets, set)
	}
}

// quantities returns nil if there are none.
func quantities(amounts map[string]Quantity) map[string]string {
	if len(amounts) == 0 {
		return nil
	}
	texts := make(map[string]string, len(amounts))
	for name, amount := range amounts {
		texts[name] = string(amount)
	}
	return texts
}

// maxReplicas limits how many machines a node group of the fake starts with.
const maxReplicas = 10000

func (g NodeGroup) sizes(c *compiler, field string) {
	switch {
	case g.MinSize < 0:
		c.wrong(field+".minSize", "%d is negative", g.MinSize)
	case g.MaxSize != nil && *g.MaxSize < g.MinSize:
		c.wrong(field+".maxSize", "%d is less than minSize, which is %d", *g.MaxSize, g.MinSize)
	}
	switch {
	case g.Replicas < 0:
		c.wrong(field+".replicas", "%d is negative", g.Replicas)
	case g.Replicas > maxReplicas:
		c.wrong(field+".replicas", "%d is more than %d", g.Replicas, maxReplicas)
	case g.MaxSize != nil && *g.MaxSize >= 0 && g.Replicas > *g.MaxSize:
		c.wrong(field+".replicas", "%d is more than maxSize, which is %d", g.Replicas, *g.MaxSize)
	}
}

func unavailableReasons() []string {
	var names []string
	for _, number := range slices.Sorted(maps.Keys(agentv1alpha1.UnavailableReason_name))[1:] {
		names = append(names, strings.TrimPrefix(agentv1alpha1.UnavailableReason_name[number], "UNAVAILABLE_REASON_"))
	}
	return names
}

func (s *Scenario) identities(c *compiler, out *compiled, domain string) {
	names := map[string]bool{}
	for i, one := range s.Identities {
		field := fmt.Sprintf("identities[%d]", i)
		id, err := url.Parse(one.ID)
		switch {
		case err != nil || id.Scheme != "spiffe" || id.Host != domain || strings.Trim(id.Path, "/") == "":
			c.wrong(field+".id", "%q is not a SPIFFE id of the trust domain; write spiffe://%s/<path>", one.ID, domain)
		case strings.HasPrefix(id.Path, "/cluster/") || strings.HasPrefix(id.Path, "/bootstrap/"):
			c.wrong(field+".id", "%q is a Cluster's own id, which has its role without an entry here", one.ID)
		case out.grants[one.ID] != nil:
			c.wrong(field+".id", "%q appears twice; list all of its roles in one entry", one.ID)
		}
		if len(validation.IsDNS1123Label(one.Name)) > 0 || one.Name == "cluster" {
			c.wrong(field+".name", "%q is not a name of a folder; write lower case letters, digits and hyphens, and not cluster", one.Name)
		}
		if names[one.Name] {
			c.wrong(field+".name", "%q is that of another identity", one.Name)
		}
		names[one.Name] = true
		if len(one.Roles) == 0 {
			c.wrong(field+".roles", "is empty; name reader, autoscaler or admin")
		}
		grants := make([]fakeagent.Grant, 0, len(one.Roles))
		for j, role := range one.Roles {
			grant := fakeagent.Grant{Role: fakeagent.Role(role), AllClusters: one.AllClusters, Clusters: one.Clusters}
			switch grant.Role {
			case fakeagent.RoleReader, fakeagent.RoleAutoscaler, fakeagent.RoleAdmin:
			default:
				c.wrong(fmt.Sprintf("%s.roles[%d]", field, j), "%q is not one of reader, autoscaler, admin", role)
				continue
			}
			if err := grant.Validate(); err != nil && j == 0 {
				c.errs = append(c.errs, fmt.Errorf("%s.%w", field, err))
			}
			grants = append(grants, grant)
		}
		out.grants[one.ID] = grants
	}
}

// reasons creates the errors of failing calls, as the agent does.
var reasons = map[agenterrors.Reason]func(message string) error{
	agenterrors.ReasonHubUnreachable:   agenterrors.HubUnreachable,
	agenterrors.ReasonNotSynced:        agenterrors.NotSynced,
	agenterrors.ReasonClusterPaused:    agenterrors.ClusterPaused,
	agenterrors.ReasonShuttingDown:     func(string) error { return agenterrors.ShuttingDown() },
	agenterrors.ReasonConflict:         agenterrors.Conflict,
	agenterrors.ReasonUnauthenticated:  agenterrors.Unauthenticated,
	agenterrors.ReasonPermissionDenied: agenterrors.PermissionDenied,
	agenterrors.ReasonStaleToken:       agenterrors.StaleToken,
	agenterrors.ReasonThrottled:        func(message string) error { return agenterrors.Throttled(message, time.Second) },
	agenterrors.ReasonTooManyClaims:    func(message string) error { return agenterrors.TooManyClaims(message, time.Second) },
}

func (one Call) compile(c *compiler, field string) call {
	methods := methods()
	if !slices.Contains(methods, one.Method) {
		c.wrong(field+".method", "%q is not one of %s", one.Method, strings.Join(methods, ", "))
	}
	if one.Delay == "" && one.Fail == nil {
		c.wrong(field, "has neither delay nor fail")
	}
	compiled := call{method: one.Method, delay: c.duration(field+".delay", one.Delay, 0)}
	if one.Fail == nil {
		return compiled
	}
	field += ".fail"
	compiled.times, compiled.lost = one.Fail.Times, one.Fail.LostReply
	message := cmp.Or(one.Fail.Message, "the scenario says so")
	var code codes.Code
	made, known := reasons[agenterrors.Reason(one.Fail.Reason)]
	switch {
	case (one.Fail.Reason == "") == (one.Fail.Code == ""):
		c.wrong(field, "set either reason or code")
	case one.Fail.Reason != "" && !known:
		names := make([]string, 0, len(reasons))
		for reason := range reasons {
			names = append(names, string(reason))
		}
		c.wrong(field+".reason", "%q is not one of %s", one.Fail.Reason, strings.Join(slices.Sorted(slices.Values(names)), ", "))
	case known:
		compiled.err = made(message)
	case code.UnmarshalJSON([]byte(strconv.Quote(one.Fail.Code))) != nil || code == codes.OK:
		c.wrong(field+".code", "%q is not an error code; write for example UNAVAILABLE", one.Fail.Code)
	default:
		compiled.err = status.Error(code, message)
	}
	switch {
	case compiled.times < 0:
		c.wrong(field+".times", "%d is negative; leave it out for all calls", compiled.times)
	case compiled.times == 0:
		compiled.times = fakeagent.Always
	}
	return compiled
}

// methods are the names of the API's methods.
func methods() []string {
	var names []string
	for method := range fakeagent.Rules() {
		if strings.HasPrefix(method, "/capi.agent.") {
			names = append(names, path.Base(method))
		}
	}
	slices.Sort(names)
	return names
}

func (o Outage) compile(c *compiler, field string) outage {
	compiled := outage{after: c.duration(field+".after", o.After, 0), lasts: c.duration(field+".lasts", o.Lasts, time.Second), kind: o.Kind}
	if o.Lasts == "" || compiled.lasts == 0 {
		c.wrong(field+".lasts", "is missing or 0; write how long it lasts")
	}
	if o.Every != "" {
		compiled.every = c.duration(field+".every", o.Every, compiled.lasts+1)
		if compiled.every <= compiled.lasts {
			c.wrong(field+".every", "%s is not longer than lasts, so that the outage would not end", o.Every)
		}
	}
	switch o.Kind {
	case unavailable, silent, disconnected:
	default:
		c.wrong(field+".kind", "%q is not one of unavailable, silent, disconnected", o.Kind)
	}
	return compiled
}
