package sandbox

// adminIdentity is the SPIFFE ID of somebody who may call everything.
const adminIdentity = "spiffe://" + trustDomain + "/admin"

// agentPolicy gives that identity its role.
const agentPolicy = `identities: []
`
